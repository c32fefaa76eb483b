// The collectives of one host in C++: every rank runs them at the same time, without the GIL.
//
// Every rank owns a board and slots in memory that all of them see. A segment goes through the slots
// piece by piece, as pipeline.h shows; collectives.h says what a piece is for each collective.
//
//   numbers.h   types of elements            board.h      progress, and sleeping until it comes
//   reducer.h   sums, products, extremes     pipeline.h   the order of the steps
//   copies.h    copies, past the caches      chain.h      tensors as one row of elements
//   segment.h   the arguments                collectives.h
//   slot_stores.h   how a rank stores into its own slots
//
// short_call.h is another way, for small data that somebody waits for.

#include "collectives.h"
#include "short_call.h"

extern "C" {

// Run a segment. Returns 0; 1 when local rank `missed` has not come in time, then call it again; 2
// when the counts of an alltoall are known, then call it again with targets.
int64_t hvdlite_run(Segment* segment) {
  switch (segment->work.collective) {
    case 0: return Allreduce(*segment).go();
    case 1: return Reducescatter(*segment).go();
    case 2: return Allgather(*segment).go();
    case 3: return Alltoall(*segment).go();
    default: return Broadcast(*segment).go();
  }
}

// Set results = postscale * (parts[0] op parts[1] op ...), in this order, in this process alone.
void hvdlite_reduce(int64_t type, int64_t operation, int64_t members, double postscale,
                    const char* const* parts, int64_t size, char* results) {
  reduce_of(type, operation)(members, 1.0, postscale, parts, size, results, nullptr);
}
}
