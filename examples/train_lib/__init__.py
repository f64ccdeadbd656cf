"""Parts of the training example: data, models, and the report at the end."""
