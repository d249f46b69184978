"""How the `shapes-unet` model is built: a Stable Diffusion pipeline for the scenes of `partsong.zoo.shapes`.

The task (captions, drawing, reader) is `partsong.zoo.shapes`; this package only holds what the recipe
`recipes/train_shapes_unet.py` builds and trains. Loading the trained folder needs neither.
"""
