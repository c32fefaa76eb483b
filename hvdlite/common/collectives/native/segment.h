// What is to be done: the arguments of one call, `SegmentArguments` of native/library.py.

#pragma once

#include <stdint.h>

namespace {

struct SlotStores;  // slot_stores.h

// The members, and the memory that they share.
struct Group {
  int64_t members, index, local_size;  // how many, my place among them, ranks of this host
  int64_t own;                         // my local number
  int64_t slots, slot_bytes;           // of a rank
  int64_t slots_start, row_start;      // in the memory of a rank, in bytes
  int64_t timeout_ns;
  const int64_t* local;   // by member: its local number
  char* const* memory;    // by local number: the memory of that rank
  uint64_t* base;         // by local number: pieces that we had done together before
  int64_t missed;         // set: the local rank that did not come in time
};

// Tensors in chains: a chain has a part of each tensor, and is cut into pieces as one.
struct Chains {
  int64_t tensors;
  const int64_t* sizes;        // by chain and tensor: elements
  char* const* addresses;      // by chain and tensor
};

// A small allreduce is reduced as a whole by all members. A large result goes past the caches.
struct Work {
  int64_t collective, root;
  int64_t type, operation, itemsize, result_itemsize;
  int64_t whole, streamed;
  double prescale, postscale;
  Chains source, target;
  SlotStores* stores;
  int64_t* counts;  // alltoall: elements that I send to each member, then (set) that each sends me
};

// Pieces. Zero at first.
struct Progress {
  int64_t pieces, packed, reduced, unpacked;
};

struct Segment {
  Group group;
  Work work;
  Progress progress;
};

}  // namespace
