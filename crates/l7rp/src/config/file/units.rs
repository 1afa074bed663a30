//! Values with a notation of their own: times, sizes, statuses.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A time as it is written: `100ms`, `1.5s`, `1m30s`. May be negative; the checks refuse it
/// where they know the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Without the sign.
    pub length: Duration,
    /// Below zero.
    pub negative: bool,
}

impl Time {
    /// Whole seconds.
    pub const fn secs(n: u64) -> Self {
        Self { length: Duration::from_secs(n), negative: false }
    }

    /// Milliseconds.
    pub const fn millis(n: u64) -> Self {
        Self { length: Duration::from_millis(n), negative: false }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        if digits == "0" {
            return Ok(Self::secs(0));
        }
        if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
            return Err(bare(text));
        }
        let length = parts(digits).ok_or_else(|| {
            format!(
                "`{}` is not a time: write it like `100ms`, `1.5s` or `1m30s`",
                text.escape_debug()
            )
        })?;
        Ok(Self { length, negative })
    }
}

fn bare(number: &str) -> String {
    format!("a bare number has no unit: write `{number}s` for seconds, or `{number}ms`")
}

/// Sums up numbers with units. Whole nanoseconds, so that equal times are equal plans.
fn parts(mut rest: &str) -> Option<Duration> {
    let mut total: u128 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(end);
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let unit: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        total = total.checked_add(scaled(number, unit)?)?;
        rest = after;
    }
    // Go's longest duration; what is longer is a slip of the pen.
    (total <= i64::MAX as u128).then(|| Duration::from_nanos(total as u64))
}

/// `number`, which may have a fraction, times `unit`.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let mut value =
        if whole.is_empty() { 0 } else { whole.parse::<u128>().ok()?.checked_mul(unit)? };
    let mut part = unit;
    for digit in fraction.chars() {
        part /= 10;
        value = value.checked_add(part * u128::from(digit.to_digit(10)?))?;
    }
    Some(value)
}

/// The shortest way to write a time.
pub fn show_duration(time: Duration) -> String {
    let nanos = time.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    for (unit, name) in [(3_600_000_000_000, "h"), (60_000_000_000, "m")] {
        if nanos.is_multiple_of(unit) {
            return format!("{}{name}", nanos / unit);
        }
    }
    format!("{time:?}")
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.negative { "-" } else { "" }, show_duration(self.length))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(TimeVisitor)
    }
}

struct TimeVisitor;

impl Visitor<'_> for TimeVisitor {
    type Value = Time;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a time like `100ms`, `1.5s` or `1m30s`")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Time, E> {
        Time::parse(text).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Time, E> {
        if number == 0 { Ok(Time::secs(0)) } else { Err(E::custom(bare(&number.to_string()))) }
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Time, E> {
        if number == 0 { Ok(Time::secs(0)) } else { Err(E::custom(bare(&number.to_string()))) }
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Time, E> {
        Err(E::custom(bare(&number.to_string())))
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl JsonSchema for Time {
    fn schema_name() -> Cow<'static, str> {
        "Time".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A time such as `100ms`, `1.5s` or `1m30s`.",
            "anyOf": [
                { "type": "string", "pattern": "^(0|([0-9]+(\\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$" },
                { "const": 0 }
            ]
        })
    }
}

/// A number of bytes as it is written: `65536` or `64KiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size(pub u64);

impl Size {
    /// Reads one as it is written.
    ///
    /// # Errors
    /// Why it is none, and how it is to be written.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let shift = match unit.trim_start() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            "TiB" => 40,
            "K" | "k" | "KB" | "kB" | "M" | "MB" | "G" | "GB" | "T" | "TB" => {
                let first = unit.trim_start()[..1].to_uppercase();
                return Err(format!(
                    "`{text}` could mean 1000 or 1024: write `{number}{first}iB`, or the number of bytes"
                ));
            }
            _ => return Err(not_a_size(text)),
        };
        let number: u64 = number.parse().map_err(|_| not_a_size(text))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("`{text}` is too large"))
    }
}

fn not_a_size(text: &str) -> String {
    format!(
        "`{}` is not a size: write bytes like `65536`, or `64KiB`, `10MiB`",
        text.escape_debug()
    )
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(SizeVisitor)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size like `65536`, `64KiB` or `10MiB`")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
        Size::parse(text).map_err(E::custom)
    }

    fn visit_u64<E>(self, number: u64) -> Result<Size, E> {
        Ok(Size(number))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
        u64::try_from(number)
            .map(Size)
            .map_err(|_| E::custom(format!("a size cannot be negative: `{number}`")))
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.0)
    }
}

impl JsonSchema for Size {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number of bytes, or a size such as `64KiB` or `10MiB`.",
            "anyOf": [
                { "type": "integer", "minimum": 0 },
                { "type": "string", "pattern": "^[0-9]+ *(B|KiB|MiB|GiB|TiB)?$" }
            ]
        })
    }
}

/// A status or a class of statuses: `503` or `5xx`. Whether the number is a status at all
/// is checked later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusSpec {
    /// One.
    Code(i128),
    /// All that begin with this digit.
    Class(u16),
    /// Neither, as written.
    Other(String),
}

impl<'de> Deserialize<'de> for StatusSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(StatusVisitor)
    }
}

struct StatusVisitor;

impl Visitor<'_> for StatusVisitor {
    type Value = StatusSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a status like `200`, or a class like `2xx`")
    }

    fn visit_str<E>(self, text: &str) -> Result<StatusSpec, E> {
        Ok(match text.as_bytes() {
            [digit @ b'1'..=b'5', b'x' | b'X', b'x' | b'X'] => {
                StatusSpec::Class(u16::from(digit - b'0'))
            }
            _ => match text.parse() {
                Ok(code) => StatusSpec::Code(code),
                Err(_) => StatusSpec::Other(text.to_owned()),
            },
        })
    }

    fn visit_u64<E>(self, code: u64) -> Result<StatusSpec, E> {
        Ok(StatusSpec::Code(code.into()))
    }

    fn visit_i64<E>(self, code: i64) -> Result<StatusSpec, E> {
        Ok(StatusSpec::Code(code.into()))
    }

    fn visit_unit<E>(self) -> Result<StatusSpec, E> {
        Ok(StatusSpec::Other(String::new()))
    }
}

impl Serialize for StatusSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Code(code) => to.serialize_i64(*code as i64),
            Self::Class(class) => to.collect_str(&format_args!("{class}xx")),
            Self::Other(text) => to.serialize_str(text),
        }
    }
}

impl JsonSchema for StatusSpec {
    fn schema_name() -> Cow<'static, str> {
        "Status".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A status such as 503, or a class such as \"5xx\".",
            "anyOf": [
                { "type": "integer", "minimum": 100, "maximum": 599 },
                { "type": "string", "pattern": "^[1-5]xx$" }
            ]
        })
    }
}

/// Data-plane threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCount(pub Option<u64>);

impl<'de> Deserialize<'de> for WorkerCount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WorkersVisitor)
    }
}

struct WorkersVisitor;

impl Visitor<'_> for WorkersVisitor {
    type Value = WorkerCount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`auto` or a number of threads")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<WorkerCount, E> {
        if text == "auto" {
            return Ok(WorkerCount(None));
        }
        Err(E::invalid_value(Unexpected::Str(text), &self))
    }

    fn visit_u64<E>(self, number: u64) -> Result<WorkerCount, E> {
        Ok(WorkerCount(Some(number)))
    }
}

impl Serialize for WorkerCount {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(number) => to.serialize_u64(number),
            None => to.serialize_str("auto"),
        }
    }
}

impl JsonSchema for WorkerCount {
    fn schema_name() -> Cow<'static, str> {
        "Workers".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "const": "auto" }, { "type": "integer", "minimum": 1 }] })
    }
}

/// Header names and values, in file order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("header names with their values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Fields, A::Error> {
        let mut fields = Vec::new();
        while let Some((name, value)) = from.next_entry::<String, FieldValue>()? {
            fields.push((name, value.0));
        }
        Ok(Fields(fields))
    }
}

/// The value of a header. Unlike other values it has no default, so it must not be blank.
struct FieldValue(String);

impl<'de> Deserialize<'de> for FieldValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Option::deserialize(from)? {
            Some(value) => Ok(Self(value)),
            None => {
                Err(de::Error::custom("the header has no value: write `\"\"` for an empty one"))
            }
        }
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl JsonSchema for Fields {
    fn schema_name() -> Cow<'static, str> {
        "Headers".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "object", "additionalProperties": { "type": "string" } })
    }
}
