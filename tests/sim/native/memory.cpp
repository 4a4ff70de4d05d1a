// Device memory, pinned memory and registered host memory.
#include "sim.h"

#if SIM_TORCH_AT_LEAST(2, 9)
#include <ATen/core/CachingHostAllocator.h>
#endif
#include <cstdlib>

namespace sim {

namespace {

constexpr size_t kAlign = 512;
constexpr size_t kQuarantine = size_t{64} << 20;

char* allocate_poisoned(size_t size) {
  void* ptr = nullptr;
  TORCH_CHECK(posix_memalign(&ptr, kAlign, size) == 0, "the host has no memory for the simulated device");
  std::memset(ptr, kPoison, size);
  return static_cast<char*>(ptr);
}

size_t round_to_power_of_two(size_t size) {
  size_t rounded = 1;
  while (rounded < size) rounded <<= 1;
  return rounded;
}

void check_memory_limit(int device, size_t size) {
  int64_t limit = state().memory_limit[device], live = state().count.live[device];
  TORCH_CHECK_WITH(OutOfMemoryError, limit < 0 || live + static_cast<int64_t>(size) <= limit,
                   "NPU out of memory. Tried to allocate ", size, " bytes. npu:", device, " has a capacity of ", limit,
                   " bytes of which ", live, " are in use.");
}

void check_pin_limit(size_t size) {
  int64_t limit = state().pin_limit;
  TORCH_CHECK(limit < 0 || state().count.pinned + static_cast<int64_t>(size) <= limit,
              "NPU error: out of memory. Pinning ", size, " bytes exceeds the limit of ", limit, " with ",
              state().count.pinned, " pinned");
}

void count_pinned(int64_t bytes, int64_t reserved) {
  Counters& c = state().count;
  c.pinned += bytes;
  c.pinned_reserved += reserved;
  c.pinned_peak = std::max(c.pinned_peak, c.pinned);
  c.pinned_reserved_peak = std::max(c.pinned_reserved_peak, c.pinned_reserved);
}

BlockRef new_block(Kind kind, char* ptr, size_t size) {
  auto block = std::make_shared<Block>();
  block->ptr = ptr;
  block->size = size;
  block->kind = kind;
  auto& blocks = kind == Kind::Device ? state().device_blocks : state().host_blocks;
  blocks[reinterpret_cast<uintptr_t>(ptr)] = block;
  return block;
}

BlockRef take_block(std::map<uintptr_t, BlockRef>& blocks, void* ptr) {
  auto it = blocks.find(reinterpret_cast<uintptr_t>(ptr));
  if (it == blocks.end()) return nullptr;
  BlockRef block = it->second;
  blocks.erase(it);
  block->freed = true;
  return block;
}

void put_in_quarantine(BlockRef block) {
  State& s = state();
  s.quarantine_bytes += block->size;
  s.quarantine.push_back(std::move(block));
  while (s.quarantine_bytes > kQuarantine) {
    s.quarantine_bytes -= s.quarantine.front()->size;
    s.quarantine.pop_front();
  }
}

void free_device(void* ptr) {
  if (!ptr) return;
  Locked lock;
  BlockRef block = take_block(state().device_blocks, ptr);
  if (!block) return;
  state().count.live[block->device] -= static_cast<int64_t>(block->size);
  bool clean = check_free(*block, "freed too early");
  // A queued copy that is ordered before the reuse may still read the bytes; otherwise they are lost now.
  if (!clean || !block->pending) std::memset(block->ptr, kPoison, block->size);
  put_in_quarantine(block);
}

void free_pinned(void* ptr) {
  if (!ptr) return;
  Locked lock;
  // As CUDA's host allocator does, a block that a queued copy uses lives on until the copy has run.
  if (BlockRef block = take_block(state().host_blocks, ptr))
    count_pinned(-static_cast<int64_t>(block->size), -static_cast<int64_t>(round_to_power_of_two(block->size)));
}

#if SIM_TORCH_AT_LEAST(2, 9)
using DeviceBase = c10::DeviceAllocator;
using PinnedBase = at::HostAllocator;
#else
using DeviceBase = c10::Allocator;
using PinnedBase = c10::Allocator;
#endif

struct DeviceMemory final : DeviceBase {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (!size) return {nullptr, nullptr, &free_device, where};
    Locked lock;
    check_memory_limit(device, size);
    BlockRef block = new_block(Kind::Device, allocate_poisoned(size), size);
    block->device = device;
    block->stream = current_stream_index(device);
    Counters& c = state().count;
    ++c.allocations[device];
    c.live[device] += static_cast<int64_t>(size);
    c.peak[device] = std::max(c.peak[device], c.live[device]);
    return {block->ptr, block->ptr, &free_device, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }

#if SIM_TORCH_AT_LEAST(2, 9)
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked lock;
    if (auto block = find_block(state().device_blocks, data.get(), 1)) block->recorded.set(stream_index(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked lock;
    const Counters& c = state().count;
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*array)[0].current = c.live.at(device);
      (*array)[0].peak = c.peak.at(device);
    }
    stats.num_device_alloc = c.allocations.at(device);
    return stats;
  }
  // Newer releases ask for it by this name; for older ones it is one more function.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    int64_t limit = state().memory_limit.at(device), total = limit < 0 ? kCapacity : limit;
    return {static_cast<size_t>(std::max<int64_t>(total - state().count.live[device], 0)), static_cast<size_t>(total)};
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { state().count.allocations.at(device) = 0; }
  void resetPeakStats(c10::DeviceIndex device) override {
    state().count.peak.at(device) = state().count.live.at(device);
  }
#endif
};

struct PinnedMemory final : PinnedBase {
  c10::DataPtr allocate(size_t size) override {
    c10::Device where(c10::DeviceType::CPU);
    if (!size) return {nullptr, nullptr, &free_pinned, where};
    Locked lock;
    check_pin_limit(size);
    char* ptr = allocate_poisoned(size);
    if (BlockRef stale = find_block(state().host_blocks, ptr, 1)) {
      report(c10::str("registered host memory was freed without host_unregister (", stale->size, " bytes)"));
      take_block(state().host_blocks, stale->ptr);
    }
    new_block(Kind::Pinned, ptr, size);
    ++state().count.pinned_allocations;
    count_pinned(static_cast<int64_t>(size), static_cast<int64_t>(round_to_power_of_two(size)));
    return {ptr, ptr, &free_pinned, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }

#if SIM_TORCH_AT_LEAST(2, 9)
  // Queued copies hold their blocks by themselves, and nothing is cached.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  void reset_accumulated_stats() override { state().count.pinned_allocations = 0; }
  void reset_peak_stats() override { state().count.pinned_peak = state().count.pinned; }
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = state().count.pinned;
    stats.allocated_bytes.peak = state().count.pinned_peak;
    return stats;
  }
#endif
};

DeviceMemory g_device_memory;
PinnedMemory g_pinned_memory;
REGISTER_ALLOCATOR(kType, &g_device_memory)
#if SIM_TORCH_AT_LEAST(2, 9)
const at::HostAllocatorRegistry<kType> g_pinned_registered(&g_pinned_memory);
#endif

bool overlaps_any(const Span& span) {
  for (auto& entry : state().host_blocks)
    if (Span{entry.second->ptr, entry.second->size}.overlaps(span)) return true;
  return false;
}

}  // namespace

Block::~Block() {
  if (kind == Kind::Registered) return;
  std::memset(ptr, kPoison, size);
  std::free(ptr);
}

c10::Allocator* device_allocator() { return &g_device_memory; }
c10::Allocator* pinned_allocator() { return &g_pinned_memory; }

// The block that holds all of [ptr, ptr + size).
BlockRef find_block(std::map<uintptr_t, BlockRef>& blocks, const void* ptr, size_t size) {
  auto address = reinterpret_cast<uintptr_t>(ptr);
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  --it;
  return address + size <= it->first + it->second->size ? it->second : nullptr;
}

bool is_pinned_range(const void* ptr, size_t size) {
  Locked lock;
  return ptr && find_block(state().host_blocks, ptr, std::max<size_t>(size, 1)) != nullptr;
}

void release_pending(const BlockRef& block) {
  if (--block->pending == 0 && block->freed && block->kind == Kind::Device)
    std::memset(block->ptr, kPoison, block->size);
}

void host_register(int64_t ptr, int64_t nbytes) {
  TORCH_CHECK(ptr > 0 && nbytes > 0, "NPU error: invalid argument");
  Locked lock;
  Span span{reinterpret_cast<char*>(ptr), static_cast<size_t>(nbytes)};
  TORCH_CHECK(!overlaps_any(span), "NPU error: part or all of the requested memory range is already mapped");
  check_pin_limit(span.size);
  new_block(Kind::Registered, span.ptr, span.size);
  ++state().count.host_registrations;
  count_pinned(nbytes, nbytes);
}

void host_unregister(int64_t ptr) {
  Locked lock;
  BlockRef block = find_block(state().host_blocks, reinterpret_cast<void*>(ptr), 1);
  TORCH_CHECK(block && block->kind == Kind::Registered && block->ptr == reinterpret_cast<char*>(ptr),
              "NPU error: pointer does not correspond to a registered memory region");
  check_free(*block, "unregistered too early");
  // The owner may unmap the memory next, so what is queued on it has to run now.
  for (auto& stream : state().streams)
    if (block->pending) satisfy(stream.clock);
  take_block(state().host_blocks, block->ptr);
  count_pinned(-static_cast<int64_t>(block->size), -static_cast<int64_t>(block->size));
}

}  // namespace sim
