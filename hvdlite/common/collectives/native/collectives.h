// The collectives as steps of the pipeline.

#pragma once

#include <stdint.h>

#include "chain.h"
#include "pipeline.h"
#include "reducer.h"

namespace {

int64_t pieces_of(int64_t elements, int64_t length) { return (elements + length - 1) / length; }

int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// A piece has a part for each member, which that one reduces. What a rank reduces itself is never
// packed. What is small is reduced as a whole by every rank, which saves one of the two waits.
class Allreduce : public Pipeline<Allreduce> {
 public:
  static constexpr bool kReducesBetween = true;

  explicit Allreduce(Segment& segment)
      : Pipeline(segment),
        packs_(work_.source, 0, work_.itemsize),
        sources_(packs_),
        targets_(work_.target, 0, work_.itemsize),
        unpacks_(targets_),
        reduce_(reduce_of(work_.type, work_.operation)),
        length_(boards_.slot_bytes() / work_.itemsize) {
    progress_.pieces = pieces_of(packs_.total, length_);
  }

  int64_t go() {
    if (progress_.packed == 0 && !boards_.nobody_reads()) return kWaiting;
    return work_.whole ? go_whole() : run();
  }

  void pack(int64_t piece, bool streamed) {
    pack_range(piece, 0, part(piece, me()), streamed);
    pack_range(piece, part(piece, me() + 1), length(piece), streamed);
  }

  void reduce(int64_t piece, bool streamed) {
    char* slot = boards_.slot(me(), piece);
    timed_read(piece, kAll, [&] {
      reduce_range(piece, part(piece, me()), part(piece, me() + 1), slot, streamed);
    });
  }

  void unpack(int64_t piece) {
    for (int64_t m = 0; m < members(); ++m) {
      if (m == me()) continue;
      int64_t from = part(piece, m), first = piece * length_;
      const char* slot = boards_.slot(m, piece) + from * work_.itemsize;
      timed_read(piece, m, [&] {
        unpacks_.unpack(first + from, first + part(piece, m + 1), slot, false);
      });
    }
  }

 private:
  Chain packs_, sources_, targets_, unpacks_;  // each moves forward by itself
  const Reduce reduce_;
  const int64_t length_;

  int64_t length(int64_t piece) const {
    int64_t first = piece * length_;
    return packs_.end(first, length_) - first;
  }

  // Where the part of `member` begins in a piece; that of the last member + 1 is the end.
  int64_t part(int64_t piece, int64_t member) const { return length(piece) * member / members(); }

  int64_t go_whole() {
    if (progress_.packed == 0) {
      pack_range(0, 0, packs_.total, false);
      boards_.tell(&Counters::packed, ++progress_.packed);
    }
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && !boards_.wait(m, &Counters::packed, 1)) return kWaiting;
    reduce_range(0, 0, packs_.total, nullptr, false);
    boards_.tell(&Counters::unpacked, 1);
    boards_.finish(1);
    return kDone;
  }

  void pack_range(int64_t piece, int64_t from, int64_t to, bool streamed) {
    int64_t first = piece * length_;
    char* slot = boards_.slot(me(), piece) + from * work_.itemsize;
    packs_.pack(first + from, first + to, slot, streamed);
  }

  void reduce_range(int64_t piece, int64_t from, int64_t to, char* copy, bool streamed) {
    const char* parts[kMaxMembers];
    int64_t itemsize = work_.itemsize, first = piece * length_;
    for (int64_t m = 0; m < members(); ++m) parts[m] = boards_.slot(m, piece) + from * itemsize;
    if (copy != nullptr) copy += from * itemsize;
    auto use = [&](const char* source, char* target, int64_t n) {
      parts[me()] = source;
      int64_t most = streamed ? kBlock : n;
      for (int64_t at = 0; at < n; at += most) {
        int64_t k = n - at < most ? n - at : most;
        char* result = target + at * itemsize;
        reduce_(members(), work_.prescale, work_.postscale, parts, k, result,
                streamed ? nullptr : copy);
        if (streamed) stream(copy, result, k * itemsize);
        for (int64_t m = 0; m < members(); ++m) parts[m] += k * itemsize;
        if (copy != nullptr) copy += k * itemsize;
      }
    };
    spans_of_both(sources_, targets_, first + from, first + to, itemsize, use);
  }
};

// A slot has a part for each other member, which gets it.
template <class Steps>
class Scattering : public Pipeline<Steps> {
 public:
  void pack(int64_t piece, bool streamed) {
    int64_t from = piece * length_;
    for (int64_t m = 0; m < this->members(); ++m)
      if (m != this->me()) {
        char* slot = part(this->me(), m, piece);
        sources_[m].pack(from, sources_[m].end(from, length_), slot, streamed);
      }
  }

 protected:
  explicit Scattering(Segment& segment) : Pipeline<Steps>(segment) {
    const Work& work = this->work_;
    int64_t part_bytes = this->boards_.slot_bytes() / (this->members() - 1) & -kLine;
    length_ = part_bytes / work.itemsize;
    for (int64_t m = 0; m < this->members(); ++m) sources_[m] = Chain(work.source, m, work.itemsize);
  }

  Chain sources_[kMaxMembers];
  int64_t length_;

  // What `sender` has for `receiver` in a piece.
  char* part(int64_t sender, int64_t receiver, int64_t piece) const {
    int64_t place = receiver < sender ? receiver : receiver - 1;
    return this->boards_.slot(sender, piece) + place * length_ * this->work_.itemsize;
  }
};

class Reducescatter : public Scattering<Reducescatter> {
 public:
  explicit Reducescatter(Segment& segment)
      : Scattering(segment),
        target_(work_.target, 0, work_.result_itemsize),
        reduce_(reduce_of(work_.type, work_.operation)) {
    int64_t most = 0;
    for (int64_t m = 0; m < members(); ++m) most = larger(most, sources_[m].total);
    progress_.pieces = pieces_of(most, length_);
  }

  void unpack(int64_t piece) {
    const char* parts[kMaxMembers];
    Chain& mine = sources_[me()];
    int64_t from = piece * length_, itemsize = work_.itemsize;
    for (int64_t m = 0; m < members(); ++m)
      if (m != me()) parts[m] = part(m, me(), piece);
    auto use = [&](const char* source, char* target, int64_t n) {
      parts[me()] = source;
      reduce_to(parts, n, target);
    };
    timed_read(piece, kAll, [&] {
      spans_of_both(mine, target_, from, mine.end(from, length_), itemsize, use);
    });
    if (work_.streamed) end_of_stream();
  }

 private:
  Chain target_;
  const Reduce reduce_;

  // Reduce n elements, past the caches by way of a small block, and move all parts on.
  void reduce_to(const char** parts, int64_t n, char* target) {
    alignas(kLine) char block[kBlock * sizeof(double)];
    int64_t itemsize = work_.result_itemsize, most = work_.streamed ? kBlock : n;
    for (int64_t at = 0; at < n; at += most) {
      int64_t k = n - at < most ? n - at : most;
      char* result = work_.streamed ? block : target + at * itemsize;
      reduce_(members(), work_.prescale, work_.postscale, parts, k, result, nullptr);
      if (work_.streamed) stream(target + at * itemsize, block, k * itemsize);
      for (int64_t m = 0; m < members(); ++m) parts[m] += k * work_.itemsize;
    }
  }
};

class Allgather : public Pipeline<Allgather> {
 public:
  explicit Allgather(Segment& segment)
      : Pipeline(segment),
        source_(work_.source, 0, work_.itemsize),
        length_(boards_.slot_bytes() / work_.itemsize) {
    int64_t most = 0;
    for (int64_t m = 0; m < members(); ++m) {
      targets_[m] = Chain(work_.target, m, work_.itemsize);
      most = larger(most, targets_[m].total);
    }
    progress_.pieces = pieces_of(most, length_);
  }

  void pack(int64_t piece, bool streamed) {
    int64_t from = piece * length_, itemsize = work_.itemsize;
    char* slot = boards_.slot(me(), piece);
    auto use = [&](const char* source, char* target, int64_t n) {
      if (streamed) {
        stream_to_both(slot, target, source, n * itemsize);
      } else if (work_.streamed) {
        stream(target, source, n * itemsize, slot);
      } else {
        memcpy(slot, source, n * itemsize);
        memcpy(target, slot, n * itemsize);
      }
      slot += n * itemsize;
    };
    spans_of_both(source_, targets_[me()], from, source_.end(from, length_), itemsize, use);
  }

  void unpack(int64_t piece) {
    int64_t from = piece * length_;
    for (int64_t m = 0; m < members(); ++m) {
      Chain& target = targets_[m];
      if (m == me()) continue;
      timed_read(piece, m, [&] {
        target.unpack(from, target.end(from, length_), boards_.slot(m, piece), work_.streamed);
      });
    }
    if (work_.streamed) end_of_stream();
  }

 private:
  Chain source_, targets_[kMaxMembers];
  const int64_t length_;

  // Block by block, so that the second copy finds the source in the first cache.
  void stream_to_both(char* slot, char* target, const char* source, int64_t bytes) {
    constexpr int64_t kBytes = 8 << 10;
    for (int64_t at = 0; at < bytes; at += kBytes) {
      int64_t n = bytes - at < kBytes ? bytes - at : kBytes;
      stream(slot + at, source + at, n);
      copy(target + at, source + at, n, work_.streamed);
    }
  }
};

class Alltoall : public Scattering<Alltoall> {
 public:
  explicit Alltoall(Segment& segment) : Scattering(segment) {
    if (progress_.pieces == 0) return;  // the targets are not known yet
    for (int64_t m = 0; m < members(); ++m) targets_[m] = Chain(work_.target, m, work_.itemsize);
  }

  // The first call ends when the counts of all members are known: they decide what is allocated.
  int64_t go() {
    if (progress_.pieces > 0) return run();
    if (progress_.packed == 0) {
      if (!boards_.nobody_reads()) return kWaiting;
      memcpy(boards_.row(me()), work_.counts, members() * sizeof(int64_t));
      pack_next();
    }
    for (int64_t m = 0; m < members(); ++m)
      if (m != me() && !boards_.wait(m, &Counters::packed, 1)) return kWaiting;
    progress_.pieces = larger(1, pieces_of(largest_count(), length_));
    for (int64_t m = 0; m < members(); ++m) work_.counts[m] = boards_.row(m)[me()];
    return kCounted;
  }

  void unpack(int64_t piece) {
    int64_t from = piece * length_;
    for (int64_t m = 0; m < members(); ++m) {
      Chain& target = targets_[m];
      if (m == me()) continue;
      timed_read(piece, m, [&] {
        target.unpack(from, target.end(from, length_), part(m, me(), piece), work_.streamed);
      });
    }
    copy_own(piece);
    if (work_.streamed) end_of_stream();
  }

 private:
  Chain targets_[kMaxMembers];

  int64_t largest_count() const {
    int64_t most = 0;
    for (int64_t sender = 0; sender < members(); ++sender)
      for (int64_t receiver = 0; receiver < members(); ++receiver)
        if (sender != receiver) most = larger(most, boards_.row(sender)[receiver]);
    return most;
  }

  // Copy what I send to myself, a share of it with each piece.
  void copy_own(int64_t piece) {
    Chain& source = sources_[me()];
    int64_t pieces = progress_.pieces, itemsize = work_.itemsize;
    int64_t from = source.total * piece / pieces, to = source.total * (piece + 1) / pieces;
    spans_of_both(source, targets_[me()], from, to, itemsize,
                  [&](const char* input, char* output, int64_t n) {
                    copy(output, input, n * itemsize, work_.streamed);
                  });
  }
};

class Broadcast : public Pipeline<Broadcast> {
 public:
  explicit Broadcast(Segment& segment)
      : Pipeline(segment),
        tensors_(work_.source, 0, work_.itemsize),
        length_(boards_.slot_bytes() / work_.itemsize) {
    progress_.pieces = pieces_of(tensors_.total, length_);
  }

  bool gives(int64_t member) const { return member == work_.root; }
  bool takes(int64_t member) const { return member != work_.root; }

  void pack(int64_t piece, bool streamed) {
    int64_t from = piece * length_, to = tensors_.end(from, length_);
    if (gives(me())) tensors_.pack(from, to, boards_.slot(me(), piece), streamed);
  }

  void unpack(int64_t piece) {
    int64_t from = piece * length_;
    if (!takes(me())) return;
    int64_t to = tensors_.end(from, length_);
    timed_read(piece, work_.root, [&] {
      tensors_.unpack(from, to, boards_.slot(work_.root, piece), work_.streamed);
    });
    if (work_.streamed) end_of_stream();
  }

 private:
  Chain tensors_;
  const int64_t length_;
};

}  // namespace
