"""How the routers of a trained model decide: counted over many images, drawn on a few, shown on one page."""
