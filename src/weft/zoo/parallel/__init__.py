"""Ways to spread a model over a mesh: its parameters, its activations, its experts."""
