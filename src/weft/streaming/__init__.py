"""Streaming: split a collective and its matrix products into chunks, so one is sent while another is multiplied.

The path of one collective:

1. site      `gather_sites`, `scatter_sites`: the products that use a gathered tensor, or that make a scattered one.
2. layout    `layouts`, `view_layouts`, `rowwise`: where each element goes through the views and calls in between.
3. chunking  `chunking`: along which dim to split, and which chunk of its arguments each call needs.
4. profit    `profit`, `trial_program`: the chunks that make the step shortest; `write_conflicts` may forbid them.
5. lowering  `lowerings`: how the chunks run, as plain nodes, fused operators, copies from peer to peer or a ring.
6. build     each lowering's `build`, called by the pass, creates the new nodes and erases the old ones.
"""
