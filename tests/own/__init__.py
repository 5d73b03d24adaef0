"""Routers, models, tasks, optimisers as users write them: each in one file, with nothing else changed."""
