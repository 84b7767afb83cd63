"""Token files: made by the prepare scripts, read by data.loader. Neither imports the model or the attention."""
