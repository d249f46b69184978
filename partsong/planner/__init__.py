"""Predicts time, memory and bytes of every legal mix of strategies, and recommends one."""

from partsong.planner.choice import Advice, Refusal
from partsong.planner.devices import DEVICES, LINKS
from partsong.planner.estimate import Estimate
from partsong.planner.hardware import Device, Link, Machine
from partsong.planner.machines import machine_named
from partsong.planner.models import MODELS, subject_named
from partsong.planner.pipeline import subject_of
from partsong.planner.recommend import advise, advise_number, recommend
from partsong.planner.subject import Subject

__all__ = [
    "DEVICES",
    "LINKS",
    "MODELS",
    "Advice",
    "Device",
    "Estimate",
    "Link",
    "Machine",
    "Refusal",
    "Subject",
    "advise",
    "advise_number",
    "machine_named",
    "recommend",
    "subject_named",
    "subject_of",
]
