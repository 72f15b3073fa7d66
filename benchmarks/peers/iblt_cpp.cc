// Gavin Andresen's IBLT in a process of its own: inserts random keys, lists them, says how long.
//
//   driver KEYS REPEATS [SEED]
//
// Prints one JSON line. Only `insert` and `listEntries` are timed, on the wall; every repeat has
// keys of its own and a table that the peer sizes for them. `listed` is whether what came out is
// what went in. The peer's sources are not here: `scripts/peers` says where they come from.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "iblt.h"

using Value = std::vector<uint8_t>;
using Entries = std::set<std::pair<uint64_t, Value>>;
using Clock = std::chrono::steady_clock;

static const size_t VALUE_BYTES = 4;

static double since(Clock::time_point started)
{
    return std::chrono::duration<double>(Clock::now() - started).count();
}

template <typename T>
static void print_list(const char* name, const std::vector<T>& values)
{
    std::cout << '"' << name << "\": [";
    for (size_t i = 0; i < values.size(); i++) std::cout << (i ? ", " : "") << values[i];
    std::cout << ']';
}

int main(int argc, char** argv)
{
    if (argc < 3 || argc > 4) {
        std::cerr << "usage: driver KEYS REPEATS [SEED]\n";
        return 2;
    }
    const size_t keys = std::strtoull(argv[1], nullptr, 10);
    const size_t repeats = std::strtoull(argv[2], nullptr, 10);
    std::mt19937_64 chance(argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0);

    std::vector<double> insert_seconds, list_seconds;
    std::vector<std::string> listed;
    for (size_t repeat = 0; repeat < repeats; repeat++) {
        std::vector<std::pair<uint64_t, Value>> entries(keys);
        for (auto& entry : entries) {
            entry.first = chance();
            const uint64_t bits = chance();
            for (size_t i = 0; i < VALUE_BYTES; i++) entry.second.push_back(bits >> 8 * i);
        }

        IBLT table(keys, VALUE_BYTES);
        auto started = Clock::now();
        for (const auto& entry : entries) table.insert(entry.first, entry.second);
        insert_seconds.push_back(since(started));

        Entries positive, negative;
        started = Clock::now();
        const bool all = table.listEntries(positive, negative);
        list_seconds.push_back(since(started));

        const Entries expected(entries.begin(), entries.end());
        listed.push_back(all && negative.empty() && positive == expected ? "true" : "false");
    }

    std::cout << '{';
    print_list("insert_seconds", insert_seconds);
    std::cout << ", ";
    print_list("list_seconds", list_seconds);
    std::cout << ", ";
    print_list("listed", listed);
    std::cout << "}\n";
    return 0;
}
