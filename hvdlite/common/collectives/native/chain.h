// The parts of tensors that go one behind the other through the slots.

#pragma once

#include <stdint.h>

#include "copies.h"
#include "segment.h"

namespace {

constexpr int64_t kMaxMembers = 256;  // of a group on one host

class Chain {
 public:
  int64_t total = 0;  // elements

  Chain() = default;
  Chain(const Chains& chains, int64_t number, int64_t itemsize)
      : sizes_(chains.sizes + number * chains.tensors),
        addresses_(chains.addresses + number * chains.tensors),
        itemsize_(itemsize) {
    for (int64_t tensor = 0; tensor < chains.tensors; ++tensor) total += sizes_[tensor];
  }

  // The end of at most `most` elements from `from` on.
  int64_t end(int64_t from, int64_t most) const {
    return total < from ? from : total - from < most ? total : from + most;
  }

  // Call use(address, n) for the stretches of tensors that hold [from, to). `from` never shrinks.
  template <class Use>
  void spans(int64_t from, int64_t to, Use use) {
    while (from < to) {
      while (from >= start_ + sizes_[tensor_]) start_ += sizes_[tensor_++];
      int64_t stop = start_ + sizes_[tensor_], n = (stop < to ? stop : to) - from;
      use(addresses_[tensor_] + (from - start_) * itemsize_, n);
      from += n;
    }
  }

  // Copy [from, to) to a slot.
  void pack(int64_t from, int64_t to, char* slot, bool streamed) {
    spans(from, to, [&](const char* address, int64_t n) {
      copy(slot, address, n * itemsize_, streamed);
      slot += n * itemsize_;
    });
  }

  // Copy from a slot to [from, to).
  void unpack(int64_t from, int64_t to, const char* slot, bool streamed) {
    spans(from, to, [&](char* address, int64_t n) {
      copy(address, slot, n * itemsize_, streamed);
      slot += n * itemsize_;
    });
  }

 private:
  const int64_t* sizes_;
  char* const* addresses_;
  int64_t itemsize_;
  int64_t tensor_ = 0, start_ = 0;  // the place of `from`, and the elements before its tensor
};

// Call use(from, to, n) for the stretches of two chains that hold the same elements, [start, end).
template <class Use>
void spans_of_both(Chain& source, Chain& target, int64_t start, int64_t end, int64_t itemsize,
                   Use use) {
  source.spans(start, end, [&](const char* from, int64_t length) {
    target.spans(start, start + length, [&](char* to, int64_t n) {
      use(from, to, n);
      from += n * itemsize;
    });
    start += length;
  });
}

}  // namespace
