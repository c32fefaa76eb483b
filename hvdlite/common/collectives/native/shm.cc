// The allreduce of shm.py in C++: every rank of a host runs it at the same time, without the GIL.
//
// Every rank owns a board and SLOTS slots in memory that all of them see. A tensor set goes through
// the slots piece by piece, and a piece has a part for each member:
//
//   pack     copy the parts that others own into my slot
//   reduce   add my part over all members, in their order: into my tensor, and into my slot
//   unpack   copy the parts of the others, from their slots, into my tensor
//
// What a rank reduces itself is never packed. A rank does whatever can be done, the oldest piece
// first: it may be SLOTS pieces ahead of the slowest one, and sleeps only when nothing can be done.
// It can be done when the peers have come so far:
//
//   reduce piece j   they have packed j
//   unpack piece j   they have reduced j
//   pack piece j     they have unpacked j - SLOTS, so that nobody reads my slot any more
//
// They tell so by counters on their boards, one set for each peer, since the sets of ranks that
// reduce together differ. A rank that sleeps names the peer it waits for; only that one wakes it.
// The rank whose piece is the oldest of all can always go on, so no ranks can wait for each other.
//
// What is small is reduced as a whole by every rank, which saves one of the two waits.

#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <type_traits>
#if defined(__F16C__) && defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLine = 64;        // bytes of a cache line: what one rank writes is its own
constexpr int64_t kBlock = 2048;     // elements that are added at a time, in the first cache
constexpr int64_t kMaxMembers = 256;  // of a group on one host

// The progress of one rank as one of its peers sees it, in pieces since the job began.
struct Counters {
  uint64_t packed, reduced, unpacked;
  char rest[kLine - 24];
};

// What a rank writes and its peers read, at the start of its memory.
struct Board {
  uint32_t waits_for;  // local number of a peer, plus 1: that one must wake me
  char rest[kLine - 4];
  Counters told[];  // by the peer's local number
};

uint64_t load(const uint64_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

// -- numbers

float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A type of elements, and the type they are added in.
template <class Real>
struct Plain {
  using Element = Real;
  using Sum = Real;
  static Sum widen(Element element) { return element; }
  static Element narrow(Sum sum) { return sum; }
};

struct Bfloat16 {
  using Element = uint16_t;
  using Sum = float;
  static Sum widen(Element element) { return as_float(uint32_t(element) << 16); }
  static Element narrow(Sum sum) {
    uint32_t bits = as_bits(sum), nan = (bits >> 16 & 0x8000) | 0x7fc0;
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return Element((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Sum = float;
  static Sum widen(Element element);
  static Element narrow(Sum sum);
};

Float16::Sum Float16::widen(Element element) {
  uint32_t sign = uint32_t(element & 0x8000) << 16, bits = element & 0x7fff;
  if (bits >= 0x7c00)  // infinite, or not a number
    return as_float(sign | 0x7f800000 | (bits & 0x3ff) << 13 | (bits > 0x7c00 ? 0x400000 : 0));
  if (bits >= 0x400) return as_float(sign | ((bits << 13) + (112u << 23)));
  return as_float(sign | as_bits(float(bits) * (1.0f / (1 << 24))));  // subnormal, or zero
}

Float16::Element Float16::narrow(Sum sum) {
  uint32_t bits = as_bits(sum), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return Element(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return Element(sign | 0x7c00);  // rounds to 65536, or is infinite
  if (bits < 0x38800000)                                  // subnormal: let an addition round
    return Element(sign | (as_bits(as_float(bits) + 0.5f) - 0x3f000000));
  bits += 0xfff + (bits >> 13 & 1);
  return Element(sign | (bits - (112u << 23)) >> 13);
}

// output = postscale * (prescale * parts[0] + prescale * parts[1] + ...), in this order, and the
// same in `also` if there is one. `output` may be one of the parts.
template <class Type>
struct Adder {
  using Element = typename Type::Element;
  using Sum = typename Type::Sum;
  int64_t members;
  Sum prescale, postscale;

  void add(const Element* const* parts, int64_t size, Element* output, Element* also) const {
    if (members == 2) {
      add_two(parts[0], parts[1], size, output);
      if (also != nullptr) memcpy(also, output, size * sizeof(Element));
      return;
    }
    alignas(kLine) Sum total[kBlock];
    for (int64_t start = 0; start < size; start += kBlock) {
      int64_t n = size - start < kBlock ? size - start : kBlock;
      load(parts[0] + start, n, total);
      for (int64_t m = 1; m < members; ++m) merge(parts[m] + start, n, total);
      store(total, n, output + start);
      if (also != nullptr) memcpy(also + start, output + start, n * sizeof(Element));
    }
  }

  // Loops over elements that depend on nothing but elements in the same place.

  void add_two(const Element* first, const Element* second, int64_t n, Element* output) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (std::is_same_v<Type, Float16>)
      for (; i + 8 <= n; i += 8)
        put8(output + i, _mm256_add_ps(take8(first + i), take8(second + i)));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k)
      output[k] = Type::narrow(
          (Type::widen(first[k]) * prescale + Type::widen(second[k]) * prescale) * postscale);
  }

  void load(const Element* part, int64_t n, Sum* total) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (std::is_same_v<Type, Float16>)
      for (; i + 8 <= n; i += 8) _mm256_storeu_ps(total + i, take8(part + i));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) total[k] = Type::widen(part[k]) * prescale;
  }

  void merge(const Element* part, int64_t n, Sum* total) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (std::is_same_v<Type, Float16>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), take8(part + i)));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) total[k] += Type::widen(part[k]) * prescale;
  }

  void store(const Sum* total, int64_t n, Element* output) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (std::is_same_v<Type, Float16>)
      for (; i + 8 <= n; i += 8) put8(output + i, _mm256_loadu_ps(total + i));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) output[k] = Type::narrow(total[k] * postscale);
  }

#if defined(__F16C__) && defined(__AVX__)
  __m256 take8(const Element* half) const {
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)half)),
                         _mm256_set1_ps(float(prescale)));
  }

  void put8(Element* half, __m256 sum) const {
    __m256 scaled = _mm256_mul_ps(sum, _mm256_set1_ps(float(postscale)));
    _mm_storeu_si128((__m128i*)half, _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

// -- what is to be done

struct SegmentArguments {
  // constant
  int64_t members, index, local_size;  // of the group, my place in it, ranks of this host
  int64_t own;                         // my local number
  int64_t tensors, total;              // how many, and all their elements
  int64_t piece, slots, slot_bytes;    // elements of a piece, slots of a rank, bytes of a slot
  int64_t slots_start;                 // where the slots begin in the memory of a rank, in bytes
  int64_t whole;                       // everybody reduces everything
  int64_t dtype, itemsize;
  int64_t timeout_ns;
  double prescale, postscale;
  const int64_t* local;        // by member: its local number
  char* const* memory;         // by local number: the memory of that rank
  uint64_t* base;              // by local number: pieces that we had done together before
  const int64_t* sizes;        // by tensor: elements
  const char* const* inputs;   // by tensor
  char* const* outputs;        // by tensor
  // progress, zero at first
  int64_t packed, reduced, unpacked;  // pieces
  int64_t missed;                     // the local rank that did not come in time
};

constexpr int64_t kDone = 0, kWaiting = 1;

// A place in the chain of tensors; it only moves forward.
struct Cursor {
  int64_t tensor = 0, start = 0;  // start: elements before this tensor
  void seek(const SegmentArguments& segment, int64_t element) {
    while (element >= start + segment.sizes[tensor]) start += segment.sizes[tensor++];
  }
};

class Run {
 public:
  explicit Run(SegmentArguments& segment)
      : segment_(segment), pieces_((segment.total + segment.piece - 1) / segment.piece) {}

  int64_t go() {
    if (segment_.packed == 0 && !nobody_reads()) return kWaiting;
    int64_t done = segment_.whole ? go_whole() : go_in_parts();
    if (done == kDone)
      for (int64_t m = 0; m < segment_.members; ++m)
        if (m != segment_.index) segment_.base[segment_.local[m]] += pieces_;
    return done;
  }

 private:
  SegmentArguments& segment_;
  int64_t pieces_;
  Cursor packs_, reduces_, unpacks_;

  Board* board(int64_t local) const { return (Board*)segment_.memory[local]; }

  char* slot(int64_t member, int64_t piece) const {
    char* memory = segment_.memory[segment_.local[member]];
    return memory + segment_.slots_start + piece % segment_.slots * segment_.slot_bytes;
  }

  int64_t first(int64_t piece) const { return piece * segment_.piece; }

  int64_t length(int64_t piece) const {
    int64_t left = segment_.total - first(piece);
    return left < segment_.piece ? left : segment_.piece;
  }

  // Where the part of `member` begins in a piece; that of the last member + 1 is the end.
  int64_t part(int64_t piece, int64_t member) const {
    return length(piece) * member / segment_.members;
  }

  // -- progress of the others

  const Counters* told_by(int64_t local) const { return &board(local)->told[segment_.own]; }

  // The member that has not come to `pieces` yet; -1: all have.
  int64_t behind(uint64_t Counters::*counter, int64_t pieces) const {
    if (pieces <= 0) return -1;
    for (int64_t m = 0; m < segment_.members; ++m) {
      int64_t local = segment_.local[m];
      uint64_t wanted = segment_.base[local] + pieces;
      if (m != segment_.index && load(&(told_by(local)->*counter)) < wanted) return m;
    }
    return -1;
  }

  void tell(uint64_t Counters::*counter, int64_t pieces) {
    Board* mine = board(segment_.own);
    for (int64_t m = 0; m < segment_.members; ++m) {
      int64_t local = segment_.local[m];
      if (m != segment_.index)
        __atomic_store_n(&(mine->told[local].*counter), segment_.base[local] + pieces,
                         __ATOMIC_RELEASE);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // before looking who sleeps: see `sleep`
    for (int64_t m = 0; m < segment_.members; ++m) {
      if (m == segment_.index) continue;
      Board* theirs = board(segment_.local[m]);
      uint32_t me = uint32_t(segment_.own + 1);
      if (__atomic_load_n(&theirs->waits_for, __ATOMIC_RELAXED) == me &&
          __atomic_compare_exchange_n(&theirs->waits_for, &me, 0, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_RELAXED))
        syscall(SYS_futex, &theirs->waits_for, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
  }

  // Sleep until `local` has come to `wanted`. False when it has not come in time.
  bool sleep(int64_t local, uint64_t Counters::*counter, uint64_t wanted) const {
    Board* mine = board(segment_.own);
    const uint64_t* seen = &(told_by(local)->*counter);
    uint32_t name = uint32_t(local + 1);
    int64_t ns = segment_.timeout_ns;
    timespec limit = {time_t(ns / 1000000000), long(ns % 1000000000)};
    bool in_time = true;
    while (load(seen) < wanted && in_time) {
      __atomic_store_n(&mine->waits_for, name, __ATOMIC_RELAXED);
      __atomic_thread_fence(__ATOMIC_SEQ_CST);  // before looking again: see `tell`
      if (load(seen) < wanted) {
        long slept = syscall(SYS_futex, &mine->waits_for, FUTEX_WAIT, name, &limit, nullptr, 0);
        // A signal looks like the end of the time: the caller looks around, and comes back.
        in_time = slept == 0 || __atomic_load_n(&mine->waits_for, __ATOMIC_RELAXED) != name;
      }
      __atomic_store_n(&mine->waits_for, 0, __ATOMIC_RELAXED);
    }
    return load(seen) >= wanted;
  }

  bool wait(int64_t member, uint64_t Counters::*counter, int64_t pieces) {
    int64_t local = segment_.local[member];
    if (sleep(local, counter, segment_.base[local] + pieces)) return true;
    segment_.missed = local;
    return false;
  }

  // Whether all ranks of the host have ended what they did together with me before.
  bool nobody_reads() {
    for (int64_t local = 0; local < segment_.local_size; ++local)
      if (segment_.base[local] > 0 && !sleep(local, &Counters::unpacked, segment_.base[local])) {
        segment_.missed = local;
        return false;
      }
    return true;
  }

  // -- the two ways

  int64_t go_whole() {
    if (segment_.packed == 0) {
      pack_range(0, 0, segment_.total);
      tell(&Counters::packed, segment_.packed = 1);
    }
    for (int64_t m; (m = behind(&Counters::packed, 1)) >= 0;)
      if (!wait(m, &Counters::packed, 1)) return kWaiting;
    reduce_range(0, 0, segment_.total, nullptr);
    segment_.reduced = segment_.unpacked = 1;
    Board* mine = board(segment_.own);
    for (int64_t m = 0; m < segment_.members; ++m) {  // nobody waits for it
      int64_t local = segment_.local[m];
      if (m != segment_.index) mine->told[local].reduced = segment_.base[local] + 1;
    }
    tell(&Counters::unpacked, 1);
    return kDone;
  }

  int64_t go_in_parts() {
    while (segment_.unpacked < pieces_) {
      bool idle = true;
      if (segment_.unpacked < segment_.reduced &&
          behind(&Counters::reduced, segment_.unpacked + 1) < 0) {
        unpack(segment_.unpacked);
        tell(&Counters::unpacked, ++segment_.unpacked);
        idle = false;
      }
      if (segment_.reduced < segment_.packed &&
          behind(&Counters::packed, segment_.reduced + 1) < 0) {
        reduce(segment_.reduced);
        tell(&Counters::reduced, ++segment_.reduced);
        idle = false;
      }
      if (segment_.packed < pieces_ && segment_.packed < segment_.unpacked + segment_.slots &&
          behind(&Counters::unpacked, segment_.packed + 1 - segment_.slots) < 0) {
        pack(segment_.packed);
        tell(&Counters::packed, ++segment_.packed);
        idle = false;
      }
      if (idle && !wait_for_the_oldest()) return kWaiting;
    }
    return kDone;
  }

  bool wait_for_the_oldest() {
    auto counter = segment_.unpacked < segment_.reduced  ? &Counters::reduced
                   : segment_.reduced < segment_.packed ? &Counters::packed
                                                : &Counters::unpacked;
    int64_t pieces = segment_.unpacked < segment_.reduced  ? segment_.unpacked + 1
                     : segment_.reduced < segment_.packed ? segment_.reduced + 1
                                                  : segment_.packed + 1 - segment_.slots;
    int64_t member = behind(counter, pieces);
    return member < 0 || wait(member, counter, pieces);
  }

  // -- a piece

  void pack(int64_t piece) {
    pack_range(piece, 0, part(piece, segment_.index));
    pack_range(piece, part(piece, segment_.index + 1), length(piece));
  }

  void reduce(int64_t piece) {
    char* mine = slot(segment_.index, piece);
    reduce_range(piece, part(piece, segment_.index), part(piece, segment_.index + 1), mine);
  }

  void unpack(int64_t piece) {
    for (int64_t m = 0; m < segment_.members; ++m) {
      if (m == segment_.index) continue;
      int64_t from = part(piece, m);
      const char* source = slot(m, piece) + from * segment_.itemsize;
      spans(unpacks_, piece, from, part(piece, m + 1), [&](int64_t tensor, int64_t at, int64_t n) {
        memcpy(segment_.outputs[tensor] + at * segment_.itemsize, source, n * segment_.itemsize);
        source += n * segment_.itemsize;
      });
    }
  }

  void pack_range(int64_t piece, int64_t from, int64_t to) {
    char* target = slot(segment_.index, piece) + from * segment_.itemsize;
    spans(packs_, piece, from, to, [&](int64_t tensor, int64_t at, int64_t n) {
      memcpy(target, segment_.inputs[tensor] + at * segment_.itemsize, n * segment_.itemsize);
      target += n * segment_.itemsize;
    });
  }

  void reduce_range(int64_t piece, int64_t from, int64_t to, char* copy) {
    switch (segment_.dtype) {
      case 0: return add<Plain<float>>(piece, from, to, copy);
      case 1: return add<Plain<double>>(piece, from, to, copy);
      case 2: return add<Float16>(piece, from, to, copy);
      case 3: return add<Bfloat16>(piece, from, to, copy);
    }
  }

  // The elements [from, to) of a piece, as stretches of the tensors they lie in.
  template <class Use>
  void spans(Cursor& cursor, int64_t piece, int64_t from, int64_t to, Use use) {
    for (int64_t at = first(piece) + from, end = first(piece) + to; at < end;) {
      cursor.seek(segment_, at);
      int64_t stop = cursor.start + segment_.sizes[cursor.tensor];
      int64_t n = (stop < end ? stop : end) - at;
      use(cursor.tensor, at - cursor.start, n);
      at += n;
    }
  }

  // Add the elements [from, to) of a piece over all members, into my tensor, and to `copy`.
  template <class Type>
  void add(int64_t piece, int64_t from, int64_t to, char* copy) {
    using Element = typename Type::Element;
    using Sum = typename Type::Sum;
    const Adder<Type> adder{segment_.members, Sum(segment_.prescale), Sum(segment_.postscale)};
    const Element* theirs[kMaxMembers];
    for (int64_t m = 0; m < segment_.members; ++m)
      theirs[m] = (const Element*)slot(m, piece) + from;
    Element* also = copy == nullptr ? nullptr : (Element*)copy + from;
    spans(reduces_, piece, from, to, [&](int64_t tensor, int64_t at, int64_t n) {
      theirs[segment_.index] = (const Element*)segment_.inputs[tensor] + at;
      adder.add(theirs, n, (Element*)segment_.outputs[tensor] + at, also);
      for (int64_t m = 0; m < segment_.members; ++m) theirs[m] += n;
      if (also != nullptr) also += n;
    });
  }
};

}  // namespace

extern "C" {

// Run a segment: 0, or 1 when local rank `missed` has not come in time; then call it again.
int64_t hvdlite_allreduce(SegmentArguments* segment) { return Run(*segment).go(); }
}
