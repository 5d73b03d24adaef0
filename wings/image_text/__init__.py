"""Image and text: two towers, captions, contrastive learning, zero-shot classification and retrieval."""
