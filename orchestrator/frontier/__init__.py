"""What a sweep found: the quality/cost frontier as numbers, a page and a picture."""
