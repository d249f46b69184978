"""Imported first by the server that ranks are forked from: lets it import the rest undisturbed, and end in time."""

import os
import signal

from partsong.foreign_messages import hide_if_parent_does
from partsong.fork_server import LEFT_OUT
from partsong.garbage import collect_later
from partsong.left_out_libraries import leave_out
from partsong.parent import end_with_parent

# A command that is refused ends within a second: its server is not to go on importing, with its output kept open.
# Once it waits for orders it notices by itself.
end_with_parent()
# The process that started it answers to Ctrl-C.
signal.signal(signal.SIGINT, signal.SIG_IGN)
collect_later()
leave_out(*os.environ.pop(LEFT_OUT, "").split())
hide_if_parent_does()
