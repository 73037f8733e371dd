"""``KVQuantizer``: makes the buffers of a layer, here in the model's dtype."""

from .kv_buffer import KVBuffer
from .window_buffer import WindowBuffer


class KVQuantizer:
    """Makes the buffers of a layer, and so decides in which form keys and values are stored.

    This class stores them in the model's dtype. Subclasses pack them or drop channels.

    Attributes:
        is_in_place: whether tokens keep their address while their buffers have free slots. The decode engine
            needs this.
        comes_to_rest: whether ``flush`` converts tokens of its buffers to another form.
    """

    is_in_place: bool = True
    comes_to_rest = False

    def of_layer(self, layer_idx: int) -> "KVQuantizer":
        """The quantizer of layer ``layer_idx``, for quantizers that treat layers differently."""
        return self

    def in_place(self, capacity: int) -> "KVQuantizer":
        """A quantizer whose buffers have slots for ``capacity`` tokens from the start, at fixed addresses.

        Raises:
            ValueError: no decode kernel reads the form in which this quantizer stores tokens.
        """
        return self

    def tokens(self, part: str, evicts: bool = False) -> KVBuffer:
        """A buffer of every token, at slots 0, 1, ….

        Args:
            part: ``keys`` or ``values``.
            evicts: whether the layer will call ``keep``.
        """
        return KVBuffer()

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> KVBuffer:
        """A buffer of the first ``num_sink_tokens`` and the last ``num_recent_tokens`` tokens."""
        return WindowBuffer(num_sink_tokens, num_recent_tokens)


NATIVE = KVQuantizer()
