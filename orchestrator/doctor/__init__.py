"""What is looked at before a sweep is trusted to a machine or a cluster: each check is one finding."""
