"""Residual streams: several copies of the residual path, read and written through learned weights.

A block reads one mixture of the S streams and adds its result to every stream, in other
proportions. Both are softmaxes over S logits a layer, so what is read is an average, and one unit
of output is shared out among the streams. The stream axis stands first: reading is then one
matrix-vector product and writing one outer product, backward included.

A stand-in for hyper-connections (Zhu et al., arXiv 2409.19606), whose weights depend on the input.
"""

import torch
from torch import Tensor, nn


class StreamMixer(nn.Module):
    """Learned logits [S]: input from +0.1 to -0.1, output from -0.1 to +0.1 to begin with."""

    def __init__(self, streams: int):
        super().__init__()
        slope = torch.linspace(0.1, -0.1, streams)
        self.input_logits = nn.Parameter(slope)
        self.output_logits = nn.Parameter(-slope)

    def read(self, streams: Tensor) -> Tensor:
        """Weighted mean of the streams: [S, N, W] to [N, W]."""
        return (self.input_logits.softmax(0) @ streams.flatten(1)).view(streams.shape[1:])

    def write(self, streams: Tensor, y: Tensor) -> Tensor:
        """Streams [S, N, W] plus y [N, W] times each stream's share."""
        shares = self.output_logits.softmax(0)
        return torch.addr(streams.flatten(1), shares, y.flatten()).view(streams.shape)
