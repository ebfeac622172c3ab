"""Estimates of a training step before anything runs, without memory for the model.

Gets a module, which may be on the device `meta`, and a sample; gives bytes and a curve of extra
time over budget. Read costs_from_file.py (costs of another run), sizes.py (one step recorded
without content, and its bytes), prediction.py (the estimate), batch.py (the largest batch for some
memory).
"""

from rockmate.estimate.batch import LargestBatch, largest_batch
from rockmate.estimate.prediction import Estimate, Point, estimate

__all__ = ["Estimate", "LargestBatch", "Point", "estimate", "largest_batch"]
