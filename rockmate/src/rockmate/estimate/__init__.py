"""What a training step will need, before anything runs and without memory for the model.

Gets a module, on the device `meta` if need be, and a sample; gives bytes and a curve of extra time
over budget. Read costs_from_file.py (costs of another run), sizes.py (one recorded
step without content, and its bytes), prediction.py (the answer), batch.py (the largest batch for
some memory).
"""

from rockmate.estimate.batch import LargestBatch, largest_batch
from rockmate.estimate.prediction import Estimate, Point, estimate

__all__ = ["Estimate", "LargestBatch", "Point", "estimate", "largest_batch"]
