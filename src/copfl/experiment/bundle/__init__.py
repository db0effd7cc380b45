"""A model bundle: a folder with everything that is needed to use one model.

bundle.json          what the model takes and returns, how it is built, and how good it is: description.py
weights.safetensors  the trained tensors by name
README.md            the model card
base/                what was not trained: frozen tensors, the base's config.json, the tokenizer

The bundles of a run share one base, models/base. Nothing in a bundle is unpickled.
"""
