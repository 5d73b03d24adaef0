"""What a trained model is worth, what it could be without training again, and how it decides."""
