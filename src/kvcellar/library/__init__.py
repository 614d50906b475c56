"""library: named models on disk: Modelfiles, content-addressed files, manifests, and model directories made of them."""
