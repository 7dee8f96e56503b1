// Which network device has an address, in the words of UCX.
#include <dirent.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "wire.hpp"

namespace {

std::string device_of(const char* address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all)) return {};
  std::string found;
  for (const ifaddrs* at = all; at && found.empty(); at = at->ifa_next) {
    if (!at->ifa_addr) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char host[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(at->ifa_addr, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST)) continue;
    if (strcmp(host, address) == 0) found = at->ifa_name;  // a zone is part of it
  }
  // An IPv4 address may have a label, "eth0:1", and is told with it instead of with its device.
  found.resize(std::min(found.size(), found.find(':')));
  freeifaddrs(all);
  return found;
}

// Ports of RDMA adapters, "mlx5_0:1": they take nothing from who has no queue pair there.
std::string adapters() {
  const std::string root = "/sys/class/infiniband/";
  std::string names;
  DIR* devices = opendir(root.c_str());
  while (const dirent* device = devices ? readdir(devices) : nullptr) {
    if (device->d_name[0] == '.') continue;
    DIR* ports = opendir((root + device->d_name + "/ports").c_str());
    while (const dirent* port = ports ? readdir(ports) : nullptr)
      if (port->d_name[0] != '.') names += std::string(",") + device->d_name + ":" + port->d_name;
    if (ports) closedir(ports);
  }
  if (devices) closedir(devices);
  return names;
}

}  // namespace

std::string net_devices(const char* address) {
  const std::string device = device_of(address);
  return device.empty() ? device : device + adapters();
}
