"""What a run needs of a GPU's memory and how long its steps take, before it is started."""
