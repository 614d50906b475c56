"""library: named models on disk (Modelfiles, content-addressed files, manifests, model directories made of them), and
downloads into the local Hugging Face cache."""
