"""Evaluation of trained models: scores, operating points, times, fine-tuning, predictions."""
