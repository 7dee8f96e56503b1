// Who may touch what: local keys, the window each peer gets, and the peer's memory mapped here.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.hpp"
#include "soft_hca.hpp"

namespace {

u32 random_key() {
  u32 key = 0;
  while (key == 0 || key == 0x100) {  // 0x100 ends a scatter list
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) key = 0;
  }
  return key;
}

// Maps a descriptor that another process made. It must not be able to shrink under us: a read
// beyond its end would be a SIGBUS here.
int map_shared(int fd, u64 at_least, Mapping* out, const char* what) {
  struct stat info;
  if (fstat(fd, &info) != 0) return ew_fail(-errno, "%s: %s", what, strerror(errno));
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK))
    return ew_fail(-EACCES, "%s can shrink; it must be a memfd sealed with F_SEAL_SHRINK", what);
  const u64 num_bytes = static_cast<u64>(info.st_size);
  if (num_bytes < at_least || num_bytes == 0)
    return ew_fail(-EINVAL, "%s has %llu bytes, expected at least %llu", what, num_bytes, at_least);
  void* addr = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (addr == MAP_FAILED) return ew_fail(-errno, "%s: mmap of %llu bytes: %s", what, num_bytes, strerror(errno));
  *out = {static_cast<u8*>(addr), num_bytes};
  return 0;
}

// The peer can write to the page: its count must not lead us outside of it.
u32 num_entries(const WindowPage* page) {
  return std::min(__atomic_load_n(&page->num_keys, __ATOMIC_ACQUIRE), kMaxWindowKeys);
}

// A field that the other side can change between two reads, read once.
template <typename T>
T read_once(const T* field) {
  return __atomic_load_n(field, __ATOMIC_RELAXED);
}

constexpr u64 kCloseTimeoutNs = 200'000'000;

bool inside(u64 addr, u64 num_bytes, u64 base, u64 length) {
  return addr >= base && num_bytes <= length && addr - base <= length - num_bytes;
}

}  // namespace

EW_API int ew_hca_pd(ew_hca* hca, u32* pd) {
  std::lock_guard guard(hca->lock);
  *pd = hca->next_pd++;
  return 0;
}

EW_API int ew_hca_register(ew_hca* hca, u32 pd, u64 addr, u64 num_bytes, u32 access, u32* key) {
  if (num_bytes == 0 || addr + num_bytes < addr)
    return ew_fail(-EINVAL, "cannot register %llu bytes at %#llx", num_bytes, addr);
  std::lock_guard guard(hca->lock);
  do *key = random_key();
  while (hca->mkeys.count(*key));
  hca->mkeys[*key] = {pd, access, addr, num_bytes};
  return 0;
}

// The key, and every window entry made from it, stops working. After this returns 0 nobody uses the
// memory any more. -ETIMEDOUT: a peer stopped in the middle of a write, or does not take what is sent from
// there; the memory must not be reused.
EW_API int ew_hca_revoke(ew_hca* hca, u32 key, u64 timeout_ns) {
  Mkey mkey;
  {
    // Our engine works in pieces under this lock: nothing local uses the key while we hold it.
    std::lock_guard guard(hca->lock);
    const auto found = hca->mkeys.find(key);
    if (found == hca->mkeys.end()) return ew_fail(-ENOENT, "key %#x is not registered", key);
    mkey = found->second;
    hca->mkeys.erase(found);
    for (ew_window* window : hca->windows)
      for (u32 i = 0; i < kMaxWindowKeys; ++i)
        if (window->lkeys[i] == key) revoke_entry(&window->page->keys[i]);
  }
  // Waiting for peers is done without the lock, so that our own work goes on.
  const u64 deadline = monotonic_ns() + timeout_ns;
  for (;;) {
    bool used = false, read = false;
    {
      std::lock_guard guard(hca->lock);  // a window may be closed meanwhile
      for (ew_window* window : hca->windows)
        for (u32 i = 0; i < kMaxWindowKeys; ++i)
          used |= window->lkeys[i] == key && __atomic_load_n(&window->page->keys[i].in_use, __ATOMIC_SEQ_CST) != 0;
      read = hca->wire && wire_reads(hca, mkey.addr, mkey.length);
    }
    if (!used && !read) return 0;
    if (monotonic_ns() > deadline)
      return ew_fail(-ETIMEDOUT, read ? "a frame that reads from the memory is still under way; do not reuse it"
                                      : "a peer stopped in the middle of a write; do not reuse the memory");
    std::this_thread::yield();
  }
}

bool find_local(ew_hca* hca, u32 pd, u32 lkey, u64 addr, u64 num_bytes, u32 access, u8** out) {
  const auto found = hca->mkeys.find(lkey);
  if (found == hca->mkeys.end()) return false;
  const Mkey& mkey = found->second;
  if (mkey.pd != pd || (mkey.access & access) != access || !inside(addr, num_bytes, mkey.addr, mkey.length))
    return false;
  *out = reinterpret_cast<u8*>(addr);
  return true;
}

EW_API int ew_window_create(ew_hca* hca, ew_window** out) {
  const int fd = memfd_create("expertwire-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return ew_fail(-errno, "memfd_create: %s", strerror(errno));
  if (ftruncate(fd, sizeof(WindowPage)) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    close(fd);
    return ew_fail(-errno, "window memory: %s", strerror(errno));
  }
  Mapping map;
  if (int error = map_shared(fd, sizeof(WindowPage), &map, "window")) {
    close(fd);
    return error;
  }
  auto* window = new ew_window{hca, reinterpret_cast<WindowPage*>(map.addr), fd};
  window->page->version = kWindowVersion;
  __atomic_store_n(&window->page->magic, kWindowMagic, __ATOMIC_RELEASE);
  std::lock_guard guard(hca->lock);
  hca->windows.push_back(window);
  *out = window;
  return 0;
}

EW_API int ew_window_fd(ew_window* window) { return window->fd; }

// Lets the window's peer use a registered region: fd_idx and fd_offset say where in the descriptors
// that it gets the region lies. The rkey is fresh and random for this pair.
EW_API int ew_window_publish(ew_window* window, u32 key, u32 fd_idx, u64 fd_offset, u32* rkey) {
  std::lock_guard guard(window->hca->lock);
  const auto found = window->hca->mkeys.find(key);
  if (found == window->hca->mkeys.end()) return ew_fail(-ENOENT, "key %#x is not registered", key);
  WindowPage* page = window->page;
  WindowKey* slot = nullptr;
  for (u32 i = 0; i < num_entries(page) && !slot; ++i)
    if (!page->keys[i].valid && __atomic_load_n(&page->keys[i].in_use, __ATOMIC_ACQUIRE) == 0) slot = &page->keys[i];
  if (!slot) {
    const u32 count = num_entries(page);
    if (count == kMaxWindowKeys) return ew_fail(-ENOSPC, "a window holds at most %u keys", kMaxWindowKeys);
    slot = &page->keys[count];
    __atomic_store_n(&page->num_keys, count + 1, __ATOMIC_RELEASE);
  }
  window->lkeys[slot - page->keys] = key;
  slot->key = *rkey = random_key();
  slot->access = found->second.access;
  slot->base = found->second.addr, slot->length = found->second.length;
  slot->fd_idx = fd_idx, slot->fd_offset = fd_offset;
  __atomic_store_n(&slot->valid, 1u, __ATOMIC_SEQ_CST);
  return 0;
}

// After this returns 0 the peer's engine writes nothing through the key any more. -ETIMEDOUT: the
// peer stopped in the middle of a write; the memory must then not be reused.
EW_API int ew_window_revoke(ew_window* window, u32 rkey, u64 timeout_ns) {
  WindowPage* page = window->page;
  for (u32 i = 0; i < num_entries(page); ++i) {
    WindowKey* key = &page->keys[i];
    if (key->key != rkey || !key->valid) continue;
    {
      std::lock_guard guard(window->hca->lock);  // our own engine stores for peers on other hosts
      revoke_entry(key);
    }
    return wait_unused(key, monotonic_ns() + timeout_ns) ? 0 : ew_fail(-ETIMEDOUT, "key %#x is still in use by the peer", rkey);
  }
  return ew_fail(-ENOENT, "key %#x is not in this window", rkey);
}

EW_API void ew_window_destroy(ew_window* window) {
  {
    std::lock_guard guard(window->hca->lock);
    auto& all = window->hca->windows;
    all.erase(std::remove(all.begin(), all.end(), window), all.end());
    if (window->hca->wire) wire_close_window(window);
    if (window->num_slots) --window->hca->num_watched;
  }
  for (u32 i = 0; i < num_entries(window->page); ++i) revoke_entry(&window->page->keys[i]);
  const u64 deadline = monotonic_ns() + kCloseTimeoutNs;
  for (u32 i = 0; i < num_entries(window->page); ++i) wait_unused(&window->page->keys[i], deadline);
  munmap(window->page, sizeof(WindowPage));
  close(window->fd);
  delete window;
}

EW_API int ew_peer_import(ew_hca* hca, int window_fd, int wake_fd, const int* region_fds, u32 num_fds, ew_peer** out) {
  Mapping window = {};
  if (int error = map_shared(window_fd, sizeof(WindowPage), &window, "the peer's window")) return error;
  auto* page = reinterpret_cast<WindowPage*>(window.addr);
  if (window.num_bytes != sizeof(WindowPage)) {
    munmap(window.addr, window.num_bytes);
    return ew_fail(-EPROTO, "the peer's window has %llu bytes, expected %zu", window.num_bytes, sizeof(WindowPage));
  }
  if (__atomic_load_n(&page->magic, __ATOMIC_ACQUIRE) != kWindowMagic || page->version != kWindowVersion) {
    const u32 version = page->version;
    munmap(window.addr, window.num_bytes);
    return ew_fail(-EPROTO, "the peer's window is not of version %u (found %u)", kWindowVersion, version);
  }
  const int own_wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
  if (own_wake_fd < 0) {
    munmap(window.addr, window.num_bytes);
    return ew_fail(-errno, "the peer's wake-up descriptor: %s", strerror(errno));
  }
  auto* peer = new ew_peer{hca, page, {}, own_wake_fd, false, false, 0};
  for (u32 i = 0; i < num_fds; ++i) {
    Mapping region;
    if (int error = map_shared(region_fds[i], 1, &region, "the peer's memory")) {
      for (Mapping& m : peer->regions) munmap(m.addr, m.num_bytes);
      munmap(window.addr, window.num_bytes);
      close(peer->wake_fd);
      delete peer;
      return error;
    }
    peer->regions.push_back(region);
  }
  std::lock_guard guard(hca->lock);
  ++hca->num_peers;
  *out = peer;
  return 0;
}

static WindowKey* match_key(ew_peer* peer, u32 rkey, u64 addr, u64 num_bytes, u32 access, u8** out) {
  // The page is the peer's: every value is read once and checked against what we mapped.
  const u32 num_keys = std::min(__atomic_load_n(&peer->page->num_keys, __ATOMIC_ACQUIRE), kMaxWindowKeys);
  for (u32 i = 0; i < num_keys; ++i) {
    WindowKey* key = &peer->page->keys[i];
    if (__atomic_load_n(&key->key, __ATOMIC_RELAXED) != rkey) continue;
    if (__atomic_load_n(&key->valid, __ATOMIC_SEQ_CST) != 1) continue;
    const u64 base = read_once(&key->base), length = read_once(&key->length), fd_offset = read_once(&key->fd_offset);
    const u32 fd_idx = read_once(&key->fd_idx);
    if ((read_once(&key->access) & access) != access || !inside(addr, num_bytes, base, length)) return nullptr;
    if (fd_idx >= peer->regions.size()) return nullptr;
    const Mapping& region = peer->regions[fd_idx];
    const u64 offset = fd_offset + (addr - base);
    if (offset < fd_offset || !inside(offset, num_bytes, 0, region.num_bytes)) return nullptr;
    *out = region.addr + offset;
    return key;
  }
  return nullptr;
}

WindowKey* find_remote(ew_peer* peer, u32 rkey, u64 addr, u64 num_bytes, u32 access, u8** out) {
  WindowKey* key = match_key(peer, rkey, addr, num_bytes, access, out);
  if (!key) return nullptr;
  // in_use first, then valid again: the owner does it the other way round, so one of us sees the other.
  __atomic_fetch_add(&key->in_use, 1u, __ATOMIC_SEQ_CST);
  // The key once more, too: the entry may have been revoked and given to another region meanwhile.
  if (__atomic_load_n(&key->valid, __ATOMIC_SEQ_CST) == 1 && __atomic_load_n(&key->key, __ATOMIC_SEQ_CST) == rkey)
    return key;
  release_remote(key);
  return nullptr;
}

u8* find_own(ew_window* window, u32 rkey, u64 addr, u64 num_bytes, u32 access) {
  const WindowPage* page = window->page;
  for (u32 i = 0; i < num_entries(page); ++i) {
    const WindowKey& key = page->keys[i];
    if (key.key != rkey || __atomic_load_n(&key.valid, __ATOMIC_SEQ_CST) != 1) continue;
    const bool allowed = (key.access & access) == access && inside(addr, num_bytes, key.base, key.length);
    return allowed ? reinterpret_cast<u8*>(addr) : nullptr;
  }
  return nullptr;
}

void revoke_entry(WindowKey* key) { __atomic_store_n(&key->valid, 0u, __ATOMIC_SEQ_CST); }

bool wait_unused(const WindowKey* key, u64 deadline_ns) {
  while (__atomic_load_n(&key->in_use, __ATOMIC_SEQ_CST) != 0) {
    if (monotonic_ns() > deadline_ns) return false;
    std::this_thread::yield();
  }
  return true;
}

void release_remote(WindowKey* key) { __atomic_fetch_sub(&key->in_use, 1u, __ATOMIC_SEQ_CST); }

// Where `remote_addr` is mapped here, for stores without the HCA (do_ibgda = false).
EW_API int ew_peer_map(ew_peer* peer, u32 rkey, u64 remote_addr, u64 num_bytes, u64* local_addr) {
  if (peer->endpoint) return ew_fail(-EOPNOTSUPP, "the peer is on another host: its memory cannot be mapped");
  std::lock_guard guard(peer->hca->lock);
  u8* at = nullptr;
  if (!match_key(peer, rkey, remote_addr, num_bytes, kRemoteWrite, &at))
    return ew_fail(-EACCES, "the peer does not let us write %llu bytes at %#llx", num_bytes, remote_addr);
  *local_addr = reinterpret_cast<u64>(at);
  return 0;
}

EW_API void ew_peer_lost(ew_peer* peer) {
  std::lock_guard guard(peer->hca->lock);
  peer->lost = true;
}

EW_API void ew_peer_notify(ew_peer* peer) { wake_peer(peer); }

EW_API int ew_peer_destroy(ew_peer* peer) {
  std::lock_guard guard(peer->hca->lock);
  if (peer->num_qps != 0) return ew_fail(-EBUSY, "%u queue pairs are still connected to the peer", peer->num_qps);
  if (peer->endpoint) {
    wire_close_peer(peer);
  } else {
    for (Mapping& region : peer->regions) munmap(region.addr, region.num_bytes);
    munmap(peer->page, sizeof(WindowPage));
    close(peer->wake_fd);
  }
  --peer->hca->num_peers;
  delete peer;
  return 0;
}
