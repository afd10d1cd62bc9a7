"""Ways to run the experts of a layer, best first."""
