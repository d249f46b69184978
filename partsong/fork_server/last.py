"""Imported last by the server that ranks are forked from: undoes what `first` did."""

import gc
import signal

from partsong.parent import outlive_parent

# What is there already is not searched for garbage by every rank again.
gc.freeze()
gc.enable()
signal.signal(signal.SIGINT, signal.default_int_handler)
# The signal comes when the thread that started the server ends, and from here on it may outlive that.
outlive_parent()
