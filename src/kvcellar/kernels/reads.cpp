// Reads memory once, in order, with nothing else to do: the rate that a kernel which reads weights can come near.

#include <cstdint>

extern "C" uint64_t kvcellar_read(const uint64_t* words, int64_t count) {
  const int64_t lanes = 32, ahead = 512;  // words
  uint64_t sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int64_t line = 0; line < lanes; line += 8) __builtin_prefetch(words + i + ahead + line);
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] += words[i + lane];
  }
  uint64_t sum = 0;
  for (uint64_t one : sums) sum += one;
  for (; i < count; ++i) sum += words[i];
  return sum;
}
