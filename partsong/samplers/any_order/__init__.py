"""Decides the tokens of pictures in any order: in groups, or one by one with guesses that are checked."""

from partsong.samplers.any_order.groups import decode_groups
from partsong.samplers.any_order.jacobi import decode_jacobi
from partsong.samplers.any_order.model import GroupReader, PictureModel
from partsong.samplers.any_order.orders import apart_order, group_sizes, random_order, raster_order
from partsong.samplers.any_order.rules import ASSD, LPD, PICTURE_RULES, KeyedJacobi, PictureRule, parse_picture_rule

__all__ = [
    "ASSD",
    "LPD",
    "PICTURE_RULES",
    "GroupReader",
    "KeyedJacobi",
    "PictureModel",
    "PictureRule",
    "apart_order",
    "decode_groups",
    "decode_jacobi",
    "group_sizes",
    "parse_picture_rule",
    "random_order",
    "raster_order",
]
