"""Imported last by the server that ranks are forked from: undoes what `first` did."""

import signal

from partsong.garbage import collect_again
from partsong.parent import outlive_parent

# What is there already is not searched for garbage by every rank again.
collect_again()
signal.signal(signal.SIGINT, signal.default_int_handler)
# The signal comes when the thread that started the server ends, and from here on it may outlive that.
outlive_parent()
