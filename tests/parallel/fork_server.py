"""Imported last by the server that ranks are forked from: makes ranks cheaper, which are more than there are cores."""

import gc
import os

# What is there already is not searched for garbage by every rank again.
gc.collect()
gc.freeze()

# Gloo's threads spin while the thread that talks to the same peer is interrupted in mid-sentence. Batch processes do
# not interrupt each other when a message comes: a fifth less processor time.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
