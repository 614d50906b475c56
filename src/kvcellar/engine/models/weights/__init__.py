"""weights: the files of a model's parameters: which there are, how they are read, and where they are put."""
