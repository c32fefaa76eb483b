// Copies of memory. What is larger than the caches is streamed past them: a plain store would read
// the memory first, and push out of the cache what the next piece needs.

#pragma once

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

#ifdef __SSE2__
constexpr bool kStreams = true;  // otherwise `stream` is a plain copy
#else
constexpr bool kStreams = false;
#endif

#if defined(__AVX512F__)
using Word = __m512i;
Word load_word(const char* source) { return _mm512_loadu_si512(source); }
void store_word(char* target, Word word) { _mm512_storeu_si512(target, word); }
void stream_word(char* target, Word word) { _mm512_stream_si512((Word*)target, word); }
#elif defined(__AVX__)
using Word = __m256i;
Word load_word(const char* source) { return _mm256_loadu_si256((const Word*)source); }
void store_word(char* target, Word word) { _mm256_storeu_si256((Word*)target, word); }
void stream_word(char* target, Word word) { _mm256_stream_si256((Word*)target, word); }
#elif defined(__SSE2__)
using Word = __m128i;
Word load_word(const char* source) { return _mm_loadu_si128((const Word*)source); }
void store_word(char* target, Word word) { _mm_storeu_si128((Word*)target, word); }
void stream_word(char* target, Word word) { _mm_stream_si128((Word*)target, word); }
#endif

// Copy past the caches, and plainly to `also` if there is one. `end_of_stream` must follow before
// another thread is told.
void stream(char* target, const char* source, int64_t bytes, char* also = nullptr) {
  int64_t at = 0;
#ifdef __SSE2__
  constexpr int64_t kLineBytes = 64, kWord = sizeof(Word);
  int64_t head = -(uintptr_t)target & (kLineBytes - 1);
  if (head + kLineBytes <= bytes) {
    memcpy(target, source, head);
    if (also != nullptr) memcpy(also, source, head);
    for (at = head; at + kLineBytes <= bytes; at += kLineBytes)
      for (int64_t word = at; word < at + kLineBytes; word += kWord) {
        Word value = load_word(source + word);
        if (also != nullptr) store_word(also + word, value);
        stream_word(target + word, value);
      }
  }
#endif
  memcpy(target + at, source + at, bytes - at);
  if (also != nullptr) memcpy(also + at, source + at, bytes - at);
}

void end_of_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void copy(char* target, const char* source, int64_t bytes, bool streamed) {
  if (streamed) stream(target, source, bytes);
  else memcpy(target, source, bytes);
}

}  // namespace
