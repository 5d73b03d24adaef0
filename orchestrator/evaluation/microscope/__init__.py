"""How a trained model's routers decide: measured over many images, drawn on a few, on one page."""
