"""vLLM's blocks, and the copies between them and the daemon's pages.

The K and V of a unit, the tokens of a block or of a page, whichever has fewer, are what is copied at once. Where the
attention backend keeps heads and slots apart, a page is in the daemon's own order, ``[layer][k, v][kv_head][slot]
[head_dim]``: ``native``. Where it packs a block in an order of its own, a page has the bytes of whole blocks,
``[layer][block]``, and can only be shared by engines that pack alike: ``packed``.
"""
