"""What engines need for their own tests, without a GPU: a simulated device, and a speculating executor."""

from spangraph.simulated import Pool, SimulatedDevice, SimulatedEvent, SimulatedGraph, SimulatedStream
from spangraph.speculation import SpeculatingExecutor

__all__ = ["Pool", "SimulatedDevice", "SimulatedEvent", "SimulatedGraph", "SimulatedStream", "SpeculatingExecutor"]
