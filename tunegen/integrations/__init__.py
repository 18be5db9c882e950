"""tunegen in models that others wrote: norms are recognised by what they compute, and their forward is replaced."""
