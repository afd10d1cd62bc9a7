"""The pipeline from a checkpoint to a converted one: recipe, plan, run, commit."""
