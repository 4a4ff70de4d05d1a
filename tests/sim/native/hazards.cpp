// The hazard detector: every use of a byte range is stamped with (stream, operation), and a later use that conflicts
// with a stamp without being ordered after it is reported.
#include "sim.h"

namespace sim {

void report(const std::string& text) {
  constexpr size_t kMost = 1000;  // a broken loop must not eat the memory
  if (state().hazards.size() < kMost) state().hazards.push_back(text);
}

namespace {

const char* relation(bool earlier_writes, bool later_writes) {
  if (earlier_writes) return later_writes ? "write after write" : "read after write";
  return "write after read";
}

const char* place(const Block& block) {
  return block.kind == Kind::Device ? "device" : block.kind == Kind::Pinned ? "pinned" : "registered";
}

void check_use(const Block& block, const Use& old, const Use& use, const std::string& what) {
  if (old.stream == use.stream || !(old.write || use.write)) return;
  if (old.end <= use.begin || use.end <= old.begin) return;
  if (old.seq <= state().streams[use.stream].clock.at[old.stream]) return;
  report(c10::str(relation(old.write, use.write), ": ", what, " on ", stream_name(use.stream), " uses bytes [",
                  use.begin, ", ", use.end, ") of a ", block.size, "-byte ", place(block),
                  " block, unordered with operation ", old.seq, " of ", stream_name(old.stream)));
}

// A stamp may go when whatever conflicts with it must also conflict with the newer one, or when the host waited for it.
bool superseded(const Use& old, const Use& use) {
  if (old.seq <= state().host.at[old.stream]) return true;
  bool covered = use.begin <= old.begin && old.end <= use.end;
  if (!covered || (old.write && !use.write)) return false;
  return old.stream == use.stream || (use.write && old.seq <= state().streams[use.stream].clock.at[old.stream]);
}

BlockRef find_quarantined(const char* ptr) {
  for (auto& block : state().quarantine)
    if (block->ptr <= ptr && ptr < block->ptr + block->size) return block;
  return nullptr;
}

}  // namespace

void touch(const Span& span, bool device_memory, int stream, uint64_t seq, bool write, const std::string& what) {
  if (!span.size) return;
  auto& blocks = device_memory ? state().device_blocks : state().host_blocks;
  BlockRef block = find_block(blocks, span.ptr, 1);
  if (!block) {
    if (device_memory && find_quarantined(span.ptr))
      report(c10::str("use after free: ", what, " on ", stream_name(stream), " uses freed device memory"));
    return;
  }
  size_t begin = static_cast<size_t>(span.ptr - block->ptr);
  Use use{begin, std::min(begin + span.size, block->size), stream, seq, write};
  for (const Use& old : block->uses) check_use(*block, old, use, what);
  auto& uses = block->uses;
  auto gone = [&](const Use& old) { return superseded(old, use); };
  uses.erase(std::remove_if(uses.begin(), uses.end(), gone), uses.end());
  uses.push_back(use);
}

// Freed memory belongs to the stream that allocated it: its next operation may reuse the bytes.
bool check_free(const Block& block, const char* action) {
  State& s = state();
  bool clean = true;
  for (const Use& use : block.uses) {
    if (block.recorded[use.stream] || use.seq <= s.host.at[use.stream]) continue;
    if (block.kind == Kind::Device &&
        (use.stream == block.stream || use.seq <= s.streams[block.stream].clock.at[use.stream]))
      continue;
    report(c10::str(action, ": a ", block.size, "-byte ", place(block), " block", block.kind == Kind::Device ?
                    c10::str(" of ", stream_name(block.stream)) : std::string(), " while operation ", use.seq, " of ",
                    stream_name(use.stream), " may still ", use.write ? "write" : "read", " bytes [", use.begin, ", ",
                    use.end, ")"));
    clean = false;
  }
  return clean;
}

}  // namespace sim
