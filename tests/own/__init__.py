"""Models and others as users write them: each in a file of its own, and nothing else is changed."""
