"""How each operator of torch may be cut, and how it then runs on the parts.

A rule tells along which axes the dimensions of an operator's tensors run (see
`hvdlite.common.layouts.operators`), and what runs instead of it on local tensors where that is not
the operator itself. An operator without a rule runs on whole inputs.

    rule         what a rule is
    elementwise  operators on elements, along a dimension, and reductions
    products     products of tensors
    views        operators that compute nothing
    layers       norms, embeddings, losses, attention
    images       convolutions, pooling, norms over batches
    table        which operator has which rule

and what runs on parts where that is more than the operator itself:

    attention    attention with heads, as torch has it
    ring         attention over words that are cut
    losses       cross entropies whose classes are cut
    batches      batch normalization over samples that are cut
    pieces       small ones, and random numbers
"""
