"""Many runs: sweeps on Ray Tune and the frontier they leave."""
