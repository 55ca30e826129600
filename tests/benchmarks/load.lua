-- What wrk sends: wrk ... -s load.lua URL -- BODIES GROUP LIMIT
--
-- BODIES   a file with a request body on each line, taken in turn; #N# in it becomes a number
-- GROUP    how many requests after one another carry the same line and number: 1 makes every
--          request another one, 8 is a group of eight rollouts that ask alike
-- LIMIT    stop after so many answers; 0 goes on until the time is up
--
-- At the end one line of JSON on standard output, after what wrk itself prints.

local ffi = require("ffi")
ffi.cdef("int getpid(void); int kill(int pid, int signal);")
local SIGINT = 2

local before, after = {}, {}
local group, limit, sent, seen = 1, 0, 0, 0
-- An address of this process: two loads on one server do not ask alike.
local who = tostring({}):gsub("[^%w]", "")

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

function init(args)
  for line in io.lines(args[1]) do
    local at = line:find("#N#", 1, true)
    before[#before + 1] = at and line:sub(1, at - 1) or line
    after[#after + 1] = at and line:sub(at + 3) or false
  end
  group, limit = tonumber(args[2]), tonumber(args[3])
  if limit > 0 then
    response = function()
      seen = seen + 1
      if seen == limit then
        wrk.thread:stop()
        -- The main thread would sleep on until the time is up; Ctrl-C is what wakes it.
        ffi.C.kill(ffi.C.getpid(), SIGINT)
      end
    end
  end
end

function request()
  local number = math.floor(sent / group)
  local place = number % #before + 1
  sent = sent + 1
  if not after[place] then
    return wrk.format(nil, nil, nil, before[place])
  end
  return wrk.format(nil, nil, nil, before[place] .. who .. number .. after[place])
end

function done(summary, latency, requests)
  local errors = summary.errors
  print(string.format(
    'JSON {"requests":%d,"microseconds":%d,"p50":%d,"p99":%d,"max":%d,"refused":%d,"broken":%d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    latency.max, errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
