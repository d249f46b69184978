"""Imported first by the server that ranks are forked from: lets it import the rest undisturbed, and end in time."""

import ctypes
import gc
import signal

# A command that is refused ends within a second: its server is not to go on importing, with its output kept open.
# Once it waits for orders it notices by itself.
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
# The process that started it answers to Ctrl-C.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# A tenth of the time of importing: next to nothing of what is made is garbage.
gc.disable()
