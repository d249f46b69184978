"""Builds the `shapes-unet` model: a Stable Diffusion pipeline for the scenes of `partsong_zoo.shapes`.

The task (captions, drawing, reader) is `partsong_zoo.shapes`. This package only holds what the recipe
`zoo/recipes/train_shapes_unet.py` builds and trains. Loading the trained folder needs neither.
"""
