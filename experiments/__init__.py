"""The papers' studies and the pictures of routers: they import the product, which never imports them."""
