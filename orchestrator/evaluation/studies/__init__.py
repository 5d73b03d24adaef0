"""Claims of the papers about trained routers, each as an experiment on digits that takes minutes."""
