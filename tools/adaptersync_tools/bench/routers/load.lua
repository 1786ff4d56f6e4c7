-- A trainer's load for wrk. `window` prompts are asked for `completions` times each, in shuffled order; then the next
-- ones. A prompt is token ids, the first `template` of them the same for all. Arguments are name=value:
--   model         the version asked for
--   api           completions (vLLM's) or generate (SGLang's)
--   session       1: each request names its prompt in X-Session-ID
--   seed          of the prompts and of the order they are asked for in

local VOCABULARY = 150000
local told = {}
local asked, first = 0, 0
local bodies, order, template = {}, {}, {}
local headers = { ["Content-Type"] = "application/json" }
local path

local function tokens(count, into)
  for _ = 1, count do
    into[#into + 1] = math.random(VOCABULARY)
  end
  return into
end

local function body()
  local ids = {}
  for position, id in ipairs(template) do
    ids[position] = id
  end
  local prompt = table.concat(tokens(told.tokens - told.template, ids), ",")
  if told.api == "generate" then
    return '{"lora_path":"' .. told.model .. '","input_ids":[' .. prompt .. '],"sampling_params":{"max_new_tokens":3}}'
  end
  return '{"model":"' .. told.model .. '","prompt":[' .. prompt .. '],"max_tokens":3}'
end

local function next_window()
  first = first + #bodies
  for prompt = 1, told.window do
    bodies[prompt] = body()
    for completion = 1, told.completions do
      order[(prompt - 1) * told.completions + completion] = prompt
    end
  end
  for last = #order, 2, -1 do
    local other = math.random(last)
    order[last], order[other] = order[other], order[last]
  end
end

function init(arguments)
  for _, argument in ipairs(arguments) do
    local name, value = argument:match("^(%w+)=(.*)$")
    told[name] = tonumber(value) or value
  end
  path = told.api == "generate" and "/generate" or "/v1/completions"
  math.randomseed(told.seed)
  tokens(told.template, template)
end

function request()
  local at = asked % (told.window * told.completions)
  if at == 0 then
    next_window()
  end
  asked = asked + 1
  local prompt = order[at + 1]
  if told.session == 1 then
    headers["X-Session-ID"] = "prompt-" .. told.seed .. "-" .. first + prompt
  end
  return wrk.format("POST", path, headers, bodies[prompt])
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'FOUND {"requests":%d,"seconds":%.6f,"p50_s":%.6f,"p99_s":%.6f,"errors":%d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    errors.status + errors.connect + errors.read + errors.write + errors.timeout
  ))
end
