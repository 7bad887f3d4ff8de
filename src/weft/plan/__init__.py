"""Plans, steps and decisions as data: the only home of reasons and refusals."""
