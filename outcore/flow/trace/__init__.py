"""Events within a pass, and its waits: moments on the device, stalls, the recorder behind a timeline."""

from outcore.flow.trace.file import Moment, PhaseClock, Slice, elapsed_s, has_passed, moment, wait_for, write_trace
from outcore.flow.trace.stalls import NO_TRACE, BusyTime, Stalls, Trace, Traced, TraceRecorder
